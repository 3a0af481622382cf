"""The paper's experiments, from the data to the report: problems, methods, tuning, runs, figures and claims.

It needs the extra ``paper``: ``pip install 'sgdol[paper]'``. The command line ``sgdol`` drives it.
"""
