"""A linear layer with its activation in the epilogue, on as many rows as the device says there are.

Large products go through the bulk copy engine with two programs a processor, each taking tile after tile: while one
multiplies, the other writes.  Small ones, all of whose tiles run at once, take the kernel with pointers.  Those between
are better left to the vendor's library.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.block_view import Activation
from adamerge.runtime.packed.layout import Packed
from adamerge.runtime.triton.kernels.launch import (
    blocks,
    next_pow2,
    num_stages_for,
    pdl_options,
    pdl_wait,
    precision,
    processors,
    tma_describable,
    tma_descriptor,
)


@triton.jit
@no_type_check
def gelu(x):
    """Exact GELU, `x * (1 + erf(x / sqrt 2)) / 2`, to 4e-7: as exact as float32 is, and below 0 to 2^-12 of itself.

    The library's erf would take as long as half of the product it follows.
    """
    # -log2(erfc(a / sqrt 2)) / a for 0 <= a <= 5.5: a minimax fit, weighted by what it does to the result.
    a = tl.minimum(tl.abs(x), 5.5)
    fit = 0.0007484124244497687 - 3.1915595466475426e-05 * a
    fit = fit * a - 0.007975519531731555
    fit = fit * a + 0.05319143038664033
    fit = fit * a + 0.4589757286245527
    fit = fit * a + 1.1511262990321391
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * tl.exp2(-1.0 - a * fit)


@triton.jit
@no_type_check
def times_sigmoid(x, z):
    """`x * sigmoid(z)`, without an exponential that could become infinite."""
    small = tl.exp2(-1.4426950408889634 * tl.abs(z))
    return x * (tl.where(z < 0, small, 1.0) / (1.0 + small))


@triton.jit
@no_type_check
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of that name; "none" leaves `x` as it is."""
    if ACTIVATION == "gelu":
        x = gelu(x)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        x = times_sigmoid(x, 1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    if ACTIVATION == "quick_gelu":
        x = times_sigmoid(x, 1.702 * x)
    return x


@triton.jit
@no_type_check
def place(number, tall, wide, GROUP: tl.constexpr):
    """The tile with a number: blocks of rows in groups that share their part of the weights, so that caches hold it."""
    group = number // (GROUP * wide)
    height = tl.minimum(tall - group * GROUP, GROUP)
    return group * GROUP + (number % (GROUP * wide)) % height, (number % (GROUP * wide)) // height


@triton.jit
@no_type_check
def _put(
    sum_, bias, gamma, onto, y, row, begin,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    GAMMA: tl.constexpr, ONTO: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Finish a tile and write it, rounded where the host rounds.

    Piece by piece, so that the copy to memory of one runs beside the arithmetic of the next.
    """
    if WIDE > PIECE:
        HALF: tl.constexpr = WIDE // 2
        left, right = tl.split(tl.permute(tl.reshape(sum_, (sum_.shape[0], 2, HALF)), (0, 2, 1)))
        _put(left, bias, gamma, onto, y, row, begin, OUTPUTS, HALF, PIECE, BIAS, ACTIVATION, GAMMA, ONTO, TYPE)
        _put(right, bias, gamma, onto, y, row, begin + HALF, OUTPUTS, HALF, PIECE, BIAS, ACTIVATION, GAMMA, ONTO, TYPE)
    else:
        column = begin + tl.arange(0, WIDE)
        if BIAS:
            sum_ += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        sum_ = activate(sum_, ACTIVATION)
        result = sum_.to(TYPE)
        if GAMMA:
            factor = tl.load(gamma + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) * factor[None, :]).to(TYPE)
        if ONTO:
            result = (onto.load([row, begin]).to(tl.float32) + result.to(tl.float32)).to(TYPE)
        y.store([row, begin], result)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["counted"])
@no_type_check
def _linear_described(
    x, weight, narrow, bias, gamma, onto, y, counted, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GAMMA: tl.constexpr,
    ONTO: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PIECE: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    if COUNTED:
        rows = tl.minimum(rows, tl.load(counted))
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(OUTPUTS, COLUMNS)
    HALF: tl.constexpr = COLUMNS // 2
    # Where the last tiles would keep half of the programs or fewer busy, all take half of a tile.
    last = (tall * wide) % PROGRAMS
    last = tl.where(2 * last <= PROGRAMS, last, 0)
    whole = tall * wide - last
    for number in tl.range(tl.program_id(0), whole, PROGRAMS, flatten=True):
        down, across = place(number, tall, wide, GROUP)
        sum_ = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, INPUTS, STEP):
            sum_ = tl.dot(x.load([down * ROWS, begin]), weight.load([across * COLUMNS, begin]).T, sum_)
        row, column = down * ROWS, across * COLUMNS
        _put(sum_, bias, gamma, onto, y, row, column, OUTPUTS, COLUMNS, PIECE, BIAS, ACTIVATION, GAMMA, ONTO, TYPE)
    for number in range(tl.program_id(0), 2 * last, PROGRAMS):
        down, across = place(whole + number // 2, tall, wide, GROUP)
        column = across * COLUMNS + (number % 2) * HALF
        half = tl.zeros([ROWS, HALF], tl.float32)
        for begin in range(0, INPUTS, STEP):
            half = tl.dot(x.load([down * ROWS, begin]), narrow.load([column, begin]).T, half)
        _put(half, bias, gamma, onto, y, down * ROWS, column, OUTPUTS, HALF, PIECE, BIAS, ACTIVATION, GAMMA, ONTO, TYPE)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["counted"])
@no_type_check
def _linear(
    x, weight, bias, y, counted, rows, stride_x, stride_weight,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COUNTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    if COUNTED:
        rows = tl.minimum(rows, tl.load(counted))
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(OUTPUTS, COLUMNS)
    number = tl.program_id(0)
    if number >= tall * wide:
        return
    down, across = place(number, tall, wide, GROUP)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    at_row = x + (row % rows).to(tl.int64)[:, None] * stride_x
    at_column = weight + (column % OUTPUTS).to(tl.int64)[:, None] * stride_weight
    sum_ = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, INPUTS, STEP):
        channel = begin + tl.arange(0, STEP)
        if INPUTS % STEP == 0:
            a, b = tl.load(at_row + channel[None, :]), tl.load(at_column + channel[None, :])
        else:
            inside = (channel < INPUTS)[None, :]
            a = tl.load(at_row + channel[None, :], mask=inside, other=0.0)
            b = tl.load(at_column + channel[None, :], mask=inside, other=0.0)
        sum_ = tl.dot(a, tl.trans(b), sum_, input_precision=PRECISION)
    if BIAS:
        sum_ += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    sum_ = activate(sum_, ACTIVATION)
    goes = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(y + goes, sum_.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (column < OUTPUTS)[None, :])


def linear(
    x: Packed,
    weight: Float[Tensor, "out d"],
    bias: Float[Tensor, "out"] | None,
    *,
    activation: Activation | None = None,
    gamma: Float[Tensor, "out"] | None = None,
    onto: Float[Tensor, "total out"] | None = None,
    rows: Int[Tensor, " one"] | None = None,
) -> Float[Tensor, "total out"]:
    """`x @ weight.T + bias`, with an activation if asked for.  Rows from `rows[0]` on are neither read nor written.

    Large products can be added to something: then it is `onto + gamma * (x @ weight.T + bias)`.
    """
    total, inputs = x.shape
    outputs = len(weight)
    y = torch.empty((total, outputs), dtype=x.dtype, device=x.device)
    if total == 0:
        return y
    if large(x, weight):
        programs = 2 * processors(x.device)
        # Two programs just fit into the memory of a processor.
        piece = 64 if onto is None else 32
        result = tma_descriptor(y, [128, piece])
        _linear_described[(programs,)](
            tma_descriptor(x, [128, 64]), tma_descriptor(weight, [128, 64]), tma_descriptor(weight, [64, 64]),
            bias, gamma,
            result if onto is None else tma_descriptor(onto, [128, piece]), result, rows, total,
            INPUTS=inputs, OUTPUTS=outputs, BIAS=bias is not None, ACTIVATION=activation or "none",
            GAMMA=gamma is not None, ONTO=onto is not None, COUNTED=rows is not None, ROWS=128, COLUMNS=128, STEP=64,
            PIECE=piece, GROUP=4, PROGRAMS=programs,
            TYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, num_warps=4, num_stages=3,
            **pdl_options(x),
        )  # fmt: skip
        return y
    assert gamma is None and onto is None, "only large products are added to something"
    tall, wide, step, stages = (32, 64, 32, 2) if x.dtype == torch.float32 else (64, 64, 64, 6)
    step = min(step, next_pow2(inputs))
    _linear[(blocks(total, tall) * blocks(outputs, wide),)](
        x, weight, bias, y, rows, total, x.stride(0), weight.stride(0), INPUTS=inputs, OUTPUTS=outputs,
        BIAS=bias is not None, ACTIVATION=activation or "none", COUNTED=rows is not None, ROWS=tall, COLUMNS=wide,
        STEP=step, GROUP=8, PRECISION=precision(x), num_warps=4, num_stages=num_stages_for(stages, x, tall, wide, step),
        **pdl_options(x),
    )  # fmt: skip
    return y


def worthwhile(x: Packed, weight: Float[Tensor, "out d"], activate: bool) -> bool:
    """Whether this is faster than the vendor's product and, if there is one, an activation of its own."""
    tiles = blocks(len(x), 64) * blocks(len(weight), 64)
    small = activate and x.dtype != torch.float32 and tiles <= 2 * processors(x.device)
    return small or large(x, weight)


def large(x: Packed, weight: Float[Tensor, "out d"]) -> bool:
    """Whether there are tiles for all processors, and a copy engine to bring them and to take the results away."""
    aligned = len(weight) % 8 == 0
    tiles = blocks(len(x), 128) * blocks(len(weight), 128)
    return aligned and tma_describable(x, weight) and tiles >= 2 * processors(x.device)


def wasteful(x: Packed, weight: Float[Tensor, "out d"]) -> bool:
    """Whether a large product leaves many programs idle at its end, so that the vendor's product is faster."""
    return leaves_idle(blocks(len(x), 128) * blocks(len(weight), 128), 2 * processors(x.device))


def leaves_idle(tiles: int, programs: int) -> bool:
    """Whether a fifth of the programs' time or more is spent waiting.  300 tiles take 264 programs as long as 396."""
    rounds, rest = divmod(tiles, programs)
    taken = rounds + (0 if rest == 0 else 0.5 if 2 * rest <= programs else 1)
    return tiles < 0.8 * taken * programs


def activation_reference(x: Tensor, activation: Activation) -> Tensor:
    """An activation in plain torch."""
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def linear_reference(
    x: Packed,
    weight: Float[Tensor, "out d"],
    bias: Float[Tensor, "out"] | None,
    *,
    activation: Activation | None = None,
    gamma: Float[Tensor, "out"] | None = None,
    onto: Float[Tensor, "total out"] | None = None,
) -> Float[Tensor, "total out"]:
    """The same in plain torch."""
    y = torch.nn.functional.linear(x, weight, bias)
    y = y if activation is None else activation_reference(y, activation)
    y = y if gamma is None else y * gamma
    return y if onto is None else onto + y
