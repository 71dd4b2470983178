"""Low-rank changes of products (adapters); `add_low_rank` is the public function."""

from jaxserve.kernels.low_rank.api import add_low_rank

__all__ = ["add_low_rank"]
