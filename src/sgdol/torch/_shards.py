"""Old names, until the optimizer without M has moved to ``_world``."""

from sgdol.torch._world import fitted, is_sharded, like_parameter, local, local_gradient, placed_like

__all__ = ["fitted", "is_sharded", "like_parameter", "local", "local_gradient", "placed_like"]
