"""The GEMMs and residual sums of a plain block: each by the kernel or library that is fastest for its size."""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from adamerge.runtime.block_view import Activation, LinearParams, NormParams
from adamerge.runtime.packed.layout import Packed
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.triton.kernels.launch import small_grid, tma_describable
from adamerge.runtime.triton.kernels.linear import activation_reference, large, wasteful, worthwhile
from adamerge.runtime.triton.kernels.linear import linear as linear_fused
from adamerge.runtime.triton.kernels.residual import add


@dataclass(frozen=True)
class GemmDispatch:
    """Chooses the kernels of a pass.  `counting`: only the device knows how many rows are used; kernels read it."""

    counting: bool

    def row_count(self, state: PackedState) -> Int[Tensor, " one"] | None:
        """How many rows are used, on the device; None where all of them are."""
        return state.layout.offsets[-1:] if self.counting else None

    def row_count_if_many(self, state: PackedState) -> Int[Tensor, " one"] | None:
        """The same for large arrays.  For small ones, reading the count takes longer than computing unused rows."""
        return None if small_grid(state.x) else self.row_count(state)

    def linear(
        self,
        state: PackedState,
        x: Float[Tensor, "total d"],
        layer: LinearParams,
        activation: Activation | None = None,
    ) -> Float[Tensor, "total out"]:
        """`x @ weight.T + bias` for the rows of the state, then the activation, if there is one."""
        vendor = activation is None and self._better_by_vendor(state, x, layer)
        if not vendor and worthwhile(x, layer.weight, activation is not None):
            return linear_fused(x, layer.weight, layer.bias, activation=activation, rows=self.row_count(state))
        y = linear(x, layer.weight, layer.bias)
        return y if activation is None else activation_reference(y, activation)

    def add_to(
        self,
        state: PackedState,
        x: Float[Tensor, "total inner"],
        layer: LinearParams,
        gamma: Float[Tensor, " d"] | None,
    ) -> tuple[PackedState, Packed | None]:
        """`(state + gamma * linear(x), None)` where one kernel does both, else `(state, linear(x))`."""
        same = state.x.dtype == x.dtype == (x if gamma is None else gamma).dtype
        ours = same and large(x, layer.weight) and tma_describable(state.x)
        if not ours or self._better_by_vendor(state, x, layer):
            return state, self.linear(state, x, layer)
        sum_ = linear_fused(x, layer.weight, layer.bias, gamma=gamma, onto=state.x, rows=self.row_count(state))
        return replace(state, x=sum_, normed=None, inverse=None), None

    def _better_by_vendor(self, state: PackedState, x: Float[Tensor, "total d"], layer: LinearParams) -> bool:
        """Whether all rows are used and our kernel would leave many processors idle at its end."""
        return (not self.counting or not state.merged) and wasteful(x, layer.weight)

    def sum(
        self,
        state: PackedState,
        branch: Packed | None,
        gamma: Float[Tensor, " d"] | None,
        norm: NormParams | None,
        compared: bool,
    ) -> PackedState:
        """The tokens with `gamma * branch` added, if there is a branch, and their `norm`, if there is one.

        `compared`: the tokens will be matched by cosine, so the sum also computes one over their lengths.
        """
        if branch is None and norm is None:
            return state
        compared = compared and branch is not None
        x, normed, inverse = add(
            state.x, branch, gamma=gamma, norm=norm, inverse=compared, counted=self.row_count_if_many(state)
        )
        return replace(state, x=x, normed=normed, inverse=inverse)
