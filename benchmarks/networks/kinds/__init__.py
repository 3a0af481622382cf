"""The larger networks, one module per field."""
