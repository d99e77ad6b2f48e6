"""What the fuzzer checks of a case.  Every check that fails gives a line of text."""

import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_cases import WITH_TEXT, Case, Host, build_host, draw_images
from marks import products_mix_rows  # pyright: ignore[reportMissingImports]
from torch import Tensor

import adamerge
from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.patching.apply import stack_of
from adamerge.runtime import backend
from adamerge.runtime.trace import LayerTrace, Trace

# How far the backends may be from each other, as a share of the greatest output.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
# Images whose tokens differ by their places only: links of places that mirror each other are equal up to rounding.
ALIKE = ("zeros", "constant")
# How the batches of a kind of cases run, beside the reference.
WAYS = {"recipes": ("packed",), "kernels": ("packed", "kernels"), "cuda": ("packed", "cuda", "cuda graph")}
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A shape of batches has its CUDA graph at the third call.
CALLS = {"cuda graph": 3}
# Without torch's own memory, in which compute-sanitizer sees no borders, nothing can be captured.
CAN_CAPTURE = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
# The rounding of a backend is its distance from the first of these.
ROUNDED = ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "packed"))


class Apart(str):
    """A line about outputs that differ; `share` says by how much, as a share of the greatest output."""

    share: float


@dataclass
class Outcome:
    """What became of a case: "ran", "refused" with the library's own error, "host" where the host itself cannot run.

    `near_tie`: plans differ where two links are equal up to rounding, and are equal in float64, or, for images of one
    colour, whose tokens are all alike, in float64 with a little noise.  Or outputs with equal plans differ by no more
    than rounding explains: they are equal in float64, and both backends are as far from themselves in float64.
    """

    kind: str
    problems: list[str]
    near_tie: bool = False


def try_case(case: Case, kind: str = "recipes") -> Outcome:
    """Run a case and check it in the ways of its kind.  No exception leaves this function, apart from an interrupt."""
    if isinstance(case.recipe, AdamergeError):
        return Outcome("refused", [] if len(str(case.recipe)) > 20 else [f"no message: {case.recipe!r}"])
    outcome = _try_in(case, case.dtype, WAYS[kind])
    if case.dtype in TOLERANCE and any(line.startswith("plans") for line in outcome.problems):
        noise = [0.0] * (case.dtype == torch.float32) + [1e-3] * (case.images in ALIKE)
        if any(not _try_in(case, torch.float64, noise=amount).problems for amount in noise):
            return Outcome(outcome.kind, [], near_tie=True)
    if case.dtype == torch.float32 and outcome.problems and _only_rounding(case, outcome.problems):
        return Outcome(outcome.kind, [], near_tie=True)
    return outcome


def _only_rounding(case: Case, problems: list[str]) -> bool:
    """Whether outputs are equal in float64, and differ in float32 by at most twice the rounding of each backend."""
    apart = [line.share for line in problems if isinstance(line, Apart)]
    if len(apart) < len(problems) or _try_in(case, torch.float64).problems:
        return False
    exact, *ours = (_outputs(case, dtype, way) for dtype, way in ROUNDED)
    errors = [(found - exact).abs().max().item() / _scale(exact) for found in ours]
    return max(apart) <= 2 * min(errors)


def _outputs(case: Case, dtype: torch.dtype, way: str) -> Tensor:
    """The outputs in float64; images that are not finite give 0 and are compared with nothing."""
    assert isinstance(case.recipe, Recipe)
    host = _host(case, dtype)
    with torch.inference_mode():
        found, _ = _run(host, case.recipe, way, draw_images(case, host.shape).to(dtype))
    adamerge.remove(host.model)
    return found.double().nan_to_num(0, 0, 0)


def _try_in(case: Case, dtype: torch.dtype, ways: Sequence[str] = WAYS["recipes"], noise: float = 0.0) -> Outcome:
    host = _host(case, dtype)
    images = draw_images(case, host.shape).to(dtype)
    if noise:
        images = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(case.seed))
    try:
        with torch.inference_mode():
            plain = host.see(host.model, images)
    except Exception as error:
        return Outcome("host", [] if not isinstance(error, AdamergeError) else [f"merging stayed: {error!r}"])
    keys = list(host.model.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, problems = "ran", list(_checks(case, host, images, plain, ways))
    except AdamergeError as error:
        kind, problems = "refused", [] if len(str(error)) > 20 else [f"no message: {error!r}"]
    except Exception as error:
        kind, problems = "failed", [f"bare {type(error).__name__}: {str(error)[:200]}"]
    adamerge.remove(host.model)
    with torch.inference_mode():
        if not same(host.see(host.model, images), plain) or list(host.model.state_dict()) != keys:
            problems.append("remove does not give the host back")
    return Outcome(kind, problems)


def _host(case: Case, dtype: torch.dtype) -> Host:
    host = build_host(case.host, case.side, dtype)
    if case.features and hasattr(host.model, "forward_features"):
        host = replace(host, see=lambda model, images: model.forward_features(images))
    return host


def _checks(case: Case, host: Host, images: Tensor, plain: Tensor, ways: Sequence[str]) -> Iterator[str]:
    recipe, dtype = case.recipe, images.dtype
    assert isinstance(recipe, Recipe)
    if Recipe.from_json(recipe.to_json()) != recipe:
        yield "the recipe is another one after JSON"
    finite = images.flatten(1).isfinite().all(1)
    with torch.inference_mode():
        expected, before = _run(host, recipe, "reference", images)
        yield from _sound(before, expected, plain, finite)
        for way in ways:
            if not _has_way(case, dtype, way):
                continue
            found, after = _run(host, recipe, way, images)
            yield from _sound(after, found, plain, finite)
            if dtype in TOLERANCE:
                yield from _agree(way, (found, after), (expected, before), finite)
        yield from _alone(case, host, images, finite)
    if case.gradients and dtype == torch.float32 and bool(finite.all()):
        yield from _gradients(host, recipe, images)


def _has_way(case: Case, dtype: torch.dtype, way: str) -> bool:
    """Whether a case can run in a way: kernels know three dtypes, and the texts of a case stay on the CPU."""
    if way.startswith("cuda"):
        return dtype in CUDA_DTYPES and case.host not in WITH_TEXT and (CAN_CAPTURE or way not in CALLS)
    return dtype == torch.float32 if way == "kernels" else dtype in TOLERANCE


def _run(host: Host, recipe: Recipe, way: str, images: Tensor) -> tuple[Tensor, Trace]:
    if way.startswith("cuda"):
        return _run_on_cuda(host, recipe, images, CALLS.get(way, 1))
    runtime: Any = "packed" if way == "kernels" else way
    adamerge.apply(host.model, recipe, runtime)
    if way == "kernels":
        selector = stack_of(host.model).selector
        selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)
    found = host.see(host.model, images)
    return found, adamerge.trace(host.model)


def _run_on_cuda(host: Host, recipe: Recipe, images: Tensor, calls: int) -> tuple[Tensor, Trace]:
    """The last of some calls on a CUDA device, with the kernels."""
    model = adamerge.apply(copy.deepcopy(host.model).to("cuda"), recipe, cuda_graphs=calls > 1)
    for _ in range(calls):
        found = host.see(model, images.to("cuda"))
    selector = stack_of(model).selector
    if selector.triton_failure is not None:
        raise RuntimeError(selector.triton_failure)
    return found.cpu(), _on_cpu(adamerge.trace(model))


def _on_cpu(trace: Trace) -> Trace:
    layers = tuple(
        LayerTrace(
            replace(layer.plan, slot=layer.plan.slot.cpu(), count=layer.plan.count.cpu()),
            *(rows.cpu() for rows in (layer.salience, layer.size, layer.redundancy)),
        )
        for layer in trace.layers
    )
    return replace(trace, layers=layers)


def _sound(trace: Trace, found: Tensor, plain: Tensor, finite: Tensor) -> Iterator[str]:
    """Shapes, dtypes, sizes, counts and slots.

    Other images may be spoilt by one that is not finite only where products of this machine mix rows, merging or not.
    """
    if found.shape != plain.shape or found.dtype != plain.dtype:
        yield f"output {tuple(found.shape)} {found.dtype}, host {tuple(plain.shape)} {plain.dtype}"
    if len(found) == len(finite):
        usable = finite & plain.flatten(1).isfinite().all(1)
        if not found[usable].isfinite().all() and (bool(finite.all()) or not products_mix_rows(found.dtype)):
            yield "the output is not finite where the host's is"
    size, count, slots = trace.layers[-1].size, trace.counts[:, -1], trace.slots()
    if not torch.equal(size.sum(1).double(), torch.full((len(size),), trace.patches).double()):
        yield f"sizes sum to {size.sum(1).tolist()}, not {trace.patches}"
    used = [len(row.unique()) for row in slots]
    if used != count.tolist() or bool((slots < 0).any()) or bool((trace.r < 0).any()):
        yield f"{count.tolist()} tokens are left, but slots name {used}"
    if not str(trace):
        yield "the trace has no text"


def _agree(way: str, ours: tuple[Tensor, Trace], theirs: tuple[Tensor, Trace], finite: Tensor) -> Iterator[str]:
    """Whether a backend agrees with the reference in all images that are finite."""
    (found, after), (expected, before) = ours, theirs
    if not torch.equal(after.r[finite], before.r[finite]) or not torch.equal(
        after.slots()[finite], before.slots()[finite]
    ):
        yield f"plans of {way} differ from the reference: {after.r.tolist()}, {before.r.tolist()}"
        return
    yield from _close(f"{way} and the reference", found, expected, finite)


def _alone(case: Case, host: Host, images: Tensor, finite: Tensor) -> Iterator[str]:
    """Whether an image gets the same result alone as among the others: to the bit where that is promised."""
    recipe = case.recipe
    assert isinstance(recipe, Recipe)
    together, trace = _run(host, recipe, "auto", images)
    one = case.seed % case.batch
    if not finite[one] or len(together) != len(images) or case.host in WITH_TEXT:
        return
    alone = host.see(host.model, images[one : one + 1])
    lonely = adamerge.trace(host.model)
    exact = recipe.ragged and not host.ends_in_a_product
    equal = torch.equal(lonely.r[0], trace.r[one]) and torch.equal(lonely.slots()[0], trace.slots()[one])
    if (exact or images.dtype in TOLERANCE) and not equal:
        yield f"plans differ alone and among strangers: {lonely.r[0].tolist()}, {trace.r[one].tolist()}"
        return
    if exact and not same(alone[0], together[one]):
        far = float((alone[0] - together[one]).abs().max())
        yield f"not the same bits alone and among strangers: {far:.1e}"
    if not exact:
        yield from _close("alone and among strangers", alone, together[one : one + 1], finite[one : one + 1])


def _gradients(host: Host, recipe: Recipe, images: Tensor) -> Iterator[str]:
    """Gradients of the reference are finite."""
    model = copy.deepcopy(host.model)
    with torch.enable_grad():
        adamerge.apply(model, recipe)
        host.see(model, images.clone()).square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            yield f"the gradient of {name} is not finite"
            return


def _close(what: str, found: Tensor, expected: Tensor, finite: Tensor) -> Iterator[str]:
    if found.dtype not in TOLERANCE:
        return
    rows = finite if len(found) == len(finite) else slice(None)
    found, expected = found[rows], expected[rows]
    if not found.numel():
        return
    far, scale = (found - expected).abs().max().item(), _scale(expected)
    if not far <= TOLERANCE[found.dtype] * scale:
        line = Apart(f"{what} differ by {far:.1e} of {scale:.1e}")
        line.share = far / scale
        yield line


def _scale(output: Tensor) -> float:
    return max(1.0, output.abs().max().item())


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, where not a number equals itself."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
