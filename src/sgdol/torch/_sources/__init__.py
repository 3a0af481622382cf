"""Where independent gradients come from.

The optimizer asks its sources in order, and takes what the first of them has: a pair that a held gradient completes
(:class:`HeldPair`), then the backward passes since the last step (:class:`Passes`). If none has enough, the gradient
that is there is held. A new source is one file here.
"""

from sgdol.torch._sources._gradients import Gradients, GroupWishes, Signal, Source, Wish, Wishes
from sgdol.torch._sources._pair import HeldPair
from sgdol.torch._sources._passes import Passes
from sgdol.torch._sources._recorder import Recorder
from sgdol.torch._sources._slots import Keep

__all__ = ["Gradients", "GroupWishes", "HeldPair", "Keep", "Passes", "Recorder", "Signal", "Source", "Wish", "Wishes"]
