"""Writes the page of methods from `METHODS`: `python -m adamerge.methods.catalogue > docs/methods.md`."""

import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adamerge.methods import METHODS, Method


@dataclass(frozen=True)
class Trained:
    """A method that the paper cites and that needs training: its idea, and what it would need in this library."""

    name: str
    source: str
    idea: str
    weights: str
    parts: str


TRAINED = (
    Trained(
        "DynamicViT",
        "Rao et al., NeurIPS 2021",
        "a small network before some blocks decides which tokens to keep",
        "the prediction modules, and the backbone trained with them",
        "a salience that runs the predictor; counts as in EViT, tokens dropped as in ATS",
    ),
    Trained(
        "A-ViT",
        "Yin et al., CVPR 2022",
        "one channel of a token is its halting score; a token stops once its scores add up to 1",
        "a backbone fine-tuned so that the channel means that, and the scale and shift of the score",
        "halting scores summed over layers in `Evidence`; a count rule that cuts at 1",
    ),
    Trained(
        "AdaViT",
        "Meng et al., CVPR 2022",
        "a decision network in each block chooses patches, heads and whole blocks",
        "the decision networks, and the backbone trained with them",
        "a salience that runs the decision network; heads and blocks cannot be skipped by a `Recipe`",
    ),
    Trained(
        "Evo-ViT",
        "Xu et al., AAAI 2022",
        "class attention, carried over the layers, chooses informative tokens; the others are updated through one "
        "representative token",
        "a backbone trained with slow and fast updates",
        "class attention of earlier layers in `Evidence`; a step that brings tokens back, which a `Plan` does not do",
    ),
    Trained(
        "SPViT",
        "Kong et al., ECCV 2022",
        "an attention-based selector scores tokens; those not kept become one package token",
        "the selectors, and the backbone trained with them",
        "a salience that runs the selector; EViT's links already make one token of the rest",
    ),
    Trained(
        "IA-RED²",
        "Pan et al., NeurIPS 2021",
        "an interpreter before groups of blocks drops patches that do not matter for the class",
        "the interpreters, learned by reinforcement, and the backbone trained with them",
        "a salience that runs the interpreter; a count rule that cuts at its decision",
    ),
    Trained(
        "Patch Slimming",
        "Tang et al., CVPR 2022",
        "patches are removed from the last layer back to the first, by their effect on the output features",
        "a mask of patches for each layer, found on training images, and the backbone fine-tuned with it",
        "links that read the mask by `place`; tokens dropped as in ATS",
    ),
)

NOTICE = "<!-- Made by `python -m adamerge.methods.catalogue > docs/methods.md`; a test compares the two. -->"


def render() -> str:
    """The page as Markdown."""
    methods = [
        (f"`{name}`", method.summary, source(method), options(method), knob(method)) for name, method in METHODS.items()
    ]
    trained = [(t.name, t.source, t.idea, t.weights, t.parts) for t in TRAINED]
    return "\n".join(
        [
            NOTICE,
            "",
            "# Methods",
            "",
            "Each method is a function that returns a `Recipe`.",
            "It has a file of its own in `src/adamerge/methods/papers/`.",
            "The docstring of the function says what comes from its paper and what is our reading.",
            "The knob is the option that trades accuracy for cost.",
            "Its range starts at the value that merges least and ends at the value that merges most.",
            "An option without a default must be given.",
            "",
            *_table(("method", "what it does", "source", "options", "knob"), methods),
            "",
            "## Methods that are not here",
            "",
            "The paper also cites methods that are trained.",
            "None of them is implemented.",
            "Without the trained weights the code would be another method under the same name.",
            "",
            *_table(("method", "paper", "idea", "weights it needs", "parts it needs here"), trained),
            "",
        ]
    )


def source(method: Method) -> str:
    """The first line of the docstring of the method's file: its name and paper."""
    module = sys.modules[method.make.__module__]
    return (module.__doc__ or "").strip().splitlines()[0].rstrip(".")


def options(method: Method) -> str:
    """The options of the signature with their defaults; options that a variant sets are its defaults."""
    fixed = dict(method.fixed)
    shown = []
    for name, parameter in inspect.signature(method.make).parameters.items():
        default = fixed.get(name, parameter.default)
        shown.append(f"`{name}`" if default is inspect.Parameter.empty else f"`{name}={default!r}`")
    return ", ".join(shown)


def knob(method: Method) -> str:
    """The knob and its range, from the value that merges least to the one that merges most."""
    return "" if method.knob is None else f"`{method.knob}`: {method.gentle:g} to {method.strong:g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    sys.stdout.write(render())
