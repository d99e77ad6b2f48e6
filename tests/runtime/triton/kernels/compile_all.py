"""Compile the kernels at ViT-B's sizes for compute capability 9.0 and print which files they come from."""

from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from adamerge.runtime.triton.kernels import (
    affinity,
    affinity_one_program,
    affinity_row_resident,
    attention,
    attention_entropy,
    class_attention,
    decide,
    embed,
    linear,
    match,
    mean_key_unit,
    merge,
    received_attention,
    residual,
    rotate,
    select,
    unfold,
)

HALF, FLOAT, INT, DOUBLE = "*bf16", "*fp32", "*i32", "*fp64"


def build(kernel: Any, types: dict[str, str], warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """Compile with these argument types; arguments without one are whole numbers, capital ones are constants."""
    constants = {"EARLY": True, **constants}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    options = {"num_warps": warps, "num_stages": stages}
    compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.fn.__module__.rpartition(".")[2])


def typed(**names: str) -> dict[str, str]:
    """`HALF="x y"` means that x and y are of that type."""
    return {name: globals()[kind] for kind, text in names.items() for name in text.split()}


def tile(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows},{columns}]>"


SPLIT = dict(ALTERNATING=True, FIRST=1)
ROW = dict(WIDTH=768, CHANNELS=1024, ROWS=4)
NORMED = dict(BRANCH=True, GAMMA=True, NORM=True, WEIGHT=True, BIAS=True)

for onto in (True, False):
    piece = 32 if onto else 64
    build(
        linear._linear_described, typed(HALF="bias gamma", INT="counted")
        | {"x": tile(128, 64), "weight": tile(128, 64), "narrow": tile(64, 64), "onto": tile(128, piece),
           "y": tile(128, piece)},
        INPUTS=768, OUTPUTS=3072, BIAS=True, ACTIVATION="none" if onto else "gelu_tanh", GAMMA=onto, ONTO=onto,
        COUNTED=True, ROWS=128, COLUMNS=128, STEP=64, PIECE=piece, GROUP=4, PROGRAMS=264, TYPE=tl.bfloat16,
    )  # fmt: skip
build(
    linear._linear, typed(HALF="x weight y bias", INT="counted"), INPUTS=768, OUTPUTS=3072, BIAS=True,
    ACTIVATION="gelu", COUNTED=False, ROWS=64, COLUMNS=64, STEP=64, GROUP=8, PRECISION="tf32",
)  # fmt: skip
build(
    attention._attend, typed(HALF="query key value out", FLOAT="log_sums logs", INT="offsets") | {"scale": "fp32"},
    HEADS=12, DIM=64, DIMS=64, TAIL=16, QUERIES=128, KEYS=32, SIZED=True, SUMS=True, BY_EIGHT=True, PRECISION="tf32",
)  # fmt: skip
for one in (True, False):
    columns = 256 if one else 128
    build(
        affinity._affinity, typed(HALF="x", FLOAT="inverse sums value", INT="partner offsets")
        | {"upper": tile(64, 64), "lower": tile(columns, 64), "scale": "fp32"}, warps=8, COSINE=not one,
        DESCRIBED=True, ONE_TILE=one, ROWS=64, COLUMNS=columns, WIDTH=768, STEP=64, PRECISION="tf32", **SPLIT,
    )  # fmt: skip
build(
    affinity_one_program._affinity_one_program,
    typed(FLOAT="sums value", INT="partner offsets") | {"near": tile(128, 64), "middle": tile(64, 64),
    "scale": "fp32"}, warps=16, stages=4, COSINE=False, NEAR=128, MOST=256, WIDTH=768, STEP=64,
    SHORTEST_=1e-12, **SPLIT,
)  # fmt: skip
build(
    affinity_row_resident._affinity_row_resident,
    typed(FLOAT="inverse sums value", INT="partner offsets") | {"rows": tile(64, 64),
    "wide": tile(256, 64), "middle": tile(128, 64), "narrow": tile(64, 64), "scale": "fp32"}, warps=8, stages=4,
    COSINE=False, COLUMNS=640, WIDE=256, ROWS=64, WIDTH=768, STEP=64, **SPLIT,
)  # fmt: skip
build(embed._embed, typed(HALF="patches first more positions out"), FIRST=1, MORE=True, ALL=False, WIDTH=768,
      CHANNELS=1024, ROWS=4)  # fmt: skip
build(mean_key_unit._mean_key_unit, typed(HALF="key", INT="counted") | {"out": "*fp16"}, HEADS=12, DIM=64, DIMS=64,
      ROWS=16, COUNTED=True)  # fmt: skip
build(
    class_attention._class_attention, typed(HALF="query key", FLOAT="out logs", INT="offsets") | {"scale": "fp32"},
    DIM=64, DIMS=64, KEYS=256, SIZED=True,
)  # fmt: skip
build(
    received_attention._received, typed(HALF="query key", FLOAT="log_sums out logs", INT="offsets") | {"scale": "fp32"},
    HEADS=16, DIM=72, DIMS=64, TAIL=16, QUERIES=64, KEYS=64, SIZED=True, BY_EIGHT=True, PRECISION="tf32",
)  # fmt: skip
build(
    attention_entropy._entropy,
    typed(HALF="query key", FLOAT="log_sums out logs", INT="offsets") | {"scale": "fp32"},
    HEADS=12, DIM=64, DIMS=64, TAIL=16, QUERIES=64, KEYS=64, SIZED=True, BY_EIGHT=True, PRECISION="tf32",
)  # fmt: skip
for counted in (True, False):
    build(
        select._select,
        typed(
            FLOAT="value padded_salience padded_weight weight salience redundancy",
            INT="offsets old_history slot gone goal origin count history",
        )
        | {"partner": "*i64", "source": "*i8", "merges": "*i64"},
        COUNTED=counted, KEEP=counted, SOURCES_FIRST=True, TOKENS=256, RIVALS=32, PATCHES=256,
    )  # fmt: skip
for features, width, scaled in (("*fp16", 64, False), ("*bf16", 768, True)):
    build(
        match._match, typed(FLOAT="inverse value", INT="partner offsets") | {"features": features}, WIDTH=width,
        STEP=64, ROWS=64, COLUMNS=64, PRECISION="tf32", SCALED=scaled, **SPLIT,
    )  # fmt: skip
for salience, score, rule in (
    (decide.SALIENCE_AFFINITY, decide.SCORE_FIRST, decide.RULE_ZSCORE),
    (decide.SALIENCE_ATTENTION, decide.SCORE_PROTECT, decide.RULE_ZSCORE),
    (decide.SALIENCE_ATTENTION, decide.SCORE_PROTECT, decide.RULE_THRESHOLD),
    (decide.SALIENCE_UNIFORM, decide.SCORE_SIMILARITY, decide.RULE_FIXED),
    (decide.SALIENCE_SHARPNESS, decide.SCORE_SIMILARITY, decide.RULE_FIXED),
):
    build(
        decide._decide,
        typed(
            FLOAT="sums value size weight salience redundancy", DOUBLE="numbers",
            INT="partner offsets old_history slot gone goal origin count history",
        )
        | {"strength": "fp32"},
        SALIENCE=salience.value, SCORE=score.value, WEIGHT=decide.WEIGHT_SALIENCE.value, RULE=rule.value,
        HALF=False, SOURCES_FIRST=True, TOKENS=256, RIVALS=32, PARTS=16, PATCHES=256, FLAT=decide.FLAT, **SPLIT,
    )  # fmt: skip
# The residual stream in half precision; then in float32 with a branch in half precision, as under autocast.
for stream in ("HALF", "FLOAT"):
    build(
        merge._merge,
        typed(**{stream: "x y gamma norm_weight norm_bias"})
        | typed(
            HALF="branch normed", INT="gone goal origin count offsets new_offsets",
            FLOAT="weight size new_size new_logs",
        )
        | {"eps": "fp32"}, warps=1, WIDTH=768, CHANNELS=1024, IMAGES=256, LENGTH=merge.LENGTH_LARGEST.value, LIST=32,
        **NORMED,
    )  # fmt: skip
    build(
        residual._add, typed(**{stream: "x y gamma weight bias"})
        | typed(HALF="branch normed", FLOAT="inverse", INT="counted") | {"eps": "fp32"},
        INVERSE=True, COUNTED=True, SHORTEST_=1e-12, **ROW, **NORMED,
    )  # fmt: skip
build(rotate._token_places, typed(INT="history offsets place"), STEP=1024)
for heads, interleaved, copy in ((1, False, False), (12, True, True)):
    build(
        rotate._rotate, typed(HALF="x out", FLOAT="cos sin", INT="place"), HEADS=24, TABLE_HEADS=heads, HALF=32,
        PAIRS=32, INTERLEAVED=interleaved, COPY=copy, ROWS=8, GROUP=8,
    )  # fmt: skip
build(unfold._unfold, typed(HALF="x out", INT="history offsets"), **ROW)
