"""What a backend needs to know of a host's transformer block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class BlockShape:
    """One block's widths, and the multiply-accumulates of its linear layers per token."""

    dim: int
    heads: int
    key_dim: int
    qkv: int
    project: int
    mlp: int

    @property
    def per_token(self) -> int:
        """All linear layers together."""
        return self.qkv + self.project + self.mlp

    @property
    def per_pair(self) -> int:
        """What attention costs for a query and a key: one score and one weighted value in every head."""
        return 2 * self.heads * self.key_dim


@dataclass(frozen=True)
class NormParams:
    """The parameters of a layer norm.  `dtype` is that of its output; None means that of its input."""

    weight: Float[Tensor, " d"] | None
    bias: Float[Tensor, " d"] | None
    eps: float
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LinearParams:
    """The parameters of a linear layer."""

    weight: Float[Tensor, "out d"]
    bias: Float[Tensor, " out"] | None


# The exact GELU, its approximation by a hyperbolic tangent, and `x * sigmoid(1.702 * x)`.
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class PlainBlockParams:
    """The parameters of a plain block: `x + gamma1 * project(attention(qkv(norm1(x))))`, then the same with
    `gamma2 * fc2(activation(fc1(norm2(x))))`.  A gamma of None is 1."""

    norm1: NormParams
    qkv: LinearParams
    project: LinearParams
    gamma1: Float[Tensor, " d"] | None
    norm2: NormParams
    fc1: LinearParams
    fc2: LinearParams
    gamma2: Float[Tensor, " d"] | None
    activation: Activation = "gelu"


@dataclass(frozen=True)
class SplitBlockParams:
    """A plain block whose queries, keys and values come from three layers.

    `with_qkv` gives the parameters of the block with one layer in the place of the three.
    """

    qkv: tuple[LinearParams, LinearParams, LinearParams]
    with_qkv: Callable[[LinearParams], PlainBlockParams]


@runtime_checkable
class PlainView(Protocol):
    """A view that can give the parameters of its block, so that kernels may fuse what lies between the GEMMs."""

    def params(self) -> PlainBlockParams | SplitBlockParams | None:
        """None where the block is not plain now: it has other layers in between, or hooks on its layers."""
        ...


@runtime_checkable
class View(Protocol):
    """A pre-norm block in three functions.  Leading dimensions are free, so tokens may be padded or packed.

    `project` and `mlp` give the residual branch, LayerScale and drop-path included; the runtime adds it.
    """

    @property
    def fused(self) -> bool:
        """Whether the host's attention is `scaled_dot_product_attention`."""
        ...

    @property
    def scale(self) -> float:
        """What the host multiplies attention scores by."""
        ...

    @property
    def dropout(self) -> float:
        """The dropout on attention weights in force now (0 in evaluation)."""
        ...

    @property
    def shape(self) -> BlockShape: ...

    def qkv(
        self, x: Float[Tensor, "... d"]
    ) -> tuple[Float[Tensor, "... h k"], Float[Tensor, "... h k"], Float[Tensor, "... h k"]]: ...

    def project(self, attended: Float[Tensor, "... h k"]) -> Float[Tensor, "... d"]: ...

    def mlp(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]: ...


@runtime_checkable
class AttendHeads(Protocol):
    """Attention between heads, `(b, n, h, k)`; `drop` is the host's module for dropout of weights, if it has one."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, drop: Callable[[Tensor], Tensor] | None
    ) -> Float[Tensor, "b n h k"]: ...


@runtime_checkable
class ModularView(View, Protocol):
    """A block whose attention can be computed inside calls of the host's own attention modules, so that hooks on these
    modules run."""

    def attention_branch(self, x: Float[Tensor, "b n d"], attend: AttendHeads) -> Float[Tensor, "b n d"]:
        """What `project(attend(qkv(x)))` gives."""
        ...


@dataclass(frozen=True)
class Rotation:
    """Rotary tables as kernels read them: `(patches, k)` or `(heads, patches, k)`.

    Channels are turned in pairs: channels 2i and 2i + 1 if `interleaved`, else i and i + k / 2.
    """

    cos: Float[Tensor, "*heads patches k"]
    sin: Float[Tensor, "*heads patches k"]
    interleaved: bool


@runtime_checkable
class RotaryView(View, Protocol):
    """A block that turns its queries and keys by the places of their tokens (rotary position embedding).

    The host hands its blocks tables with a row for each patch; a merged token takes the row of its `place`, the first
    patch it stands for.  Prefix tokens are not turned.  Tables are `(patches, k)` or, with one for each head,
    `(heads, patches, k)`.  The reference calls `turn`; kernels turn by `rotation`, and do not run without it.
    """

    def rotation(self, tables: tuple[Tensor, ...]) -> Rotation:
        """The host's tables as kernels read them."""
        ...

    def turn(
        self, x: Float[Tensor, "b n h k"], rows: tuple[Float[Tensor, "b n #h _"], ...]
    ) -> Float[Tensor, "b n h k"]: ...
