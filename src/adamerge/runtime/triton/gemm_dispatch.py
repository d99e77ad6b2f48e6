"""The products and sums of a plain block, each where it is fastest, on the rows that exist."""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import gelu, linear

from adamerge.runtime.block_view import LinearParams, NormParams
from adamerge.runtime.packed.layout import Packed
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.triton.kernels.launch import small_grid, tma_describable
from adamerge.runtime.triton.kernels.linear import large, worthwhile
from adamerge.runtime.triton.kernels.linear import linear as linear_fused
from adamerge.runtime.triton.kernels.residual import add


@dataclass(frozen=True)
class GemmDispatch:
    """How a pass computes.  `counting`: the device alone knows how many rows there are, and kernels ask it."""

    counting: bool

    def counted(self, state: PackedState) -> Int[Tensor, " one"] | None:
        """How many rows there are, where the device alone knows."""
        return state.layout.offsets[-1:] if self.counting else None

    def many(self, state: PackedState) -> Int[Tensor, " one"] | None:
        """The same where there are many: with few, asking takes longer than working in vain."""
        return None if small_grid(state.x) else self.counted(state)

    def linear(
        self, state: PackedState, x: Float[Tensor, "total d"], layer: LinearParams, activate: bool = False
    ) -> Float[Tensor, "total out"]:
        """A product for every token of the state, with exact GELU if asked for."""
        if worthwhile(x, layer.weight, activate):
            return linear_fused(x, layer.weight, layer.bias, gelu=activate, rows=self.counted(state))
        y = linear(x, layer.weight, layer.bias)
        return gelu(y) if activate else y

    def add_to(
        self,
        state: PackedState,
        x: Float[Tensor, "total inner"],
        layer: LinearParams,
        gamma: Float[Tensor, " d"] | None,
    ) -> tuple[PackedState, Packed | None]:
        """The tokens with a branch added, or, where this is left to what follows, as they are, and the branch."""
        if not (large(x, layer.weight) and tma_describable(state.x)):
            return state, self.linear(state, x, layer)
        sum_ = linear_fused(x, layer.weight, layer.bias, gamma=gamma, onto=state.x, rows=self.counted(state))
        return replace(state, x=sum_, normed=None, inverse=None), None

    def sum(
        self,
        state: PackedState,
        branch: Packed | None,
        gamma: Float[Tensor, " d"] | None,
        norm: NormParams | None,
        compared: bool,
    ) -> PackedState:
        """The tokens with their branch, if it still is to be added, and the norm that follows.

        If they are to be compared, the sum also gives their lengths.
        """
        if branch is None and norm is None:
            return state
        compared = compared and branch is not None
        x, normed, inverse = add(state.x, branch, gamma=gamma, norm=norm, inverse=compared, counted=self.many(state))
        return replace(state, x=x, normed=normed, inverse=inverse)
