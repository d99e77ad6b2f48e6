"""The options of repair, all checked in one place."""

import os
from dataclasses import dataclass

from adamerge.core.checks import check_number
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write
from adamerge.search.evaluator import Loss, check_loss

LEAST_TEMPERATURE = 0.1


@dataclass(frozen=True)
class RepairOptions:
    """The options of `adamerge.repair`, which its docstring explains; wrong values are refused by name.

    `smallest_crop` is the least share of an image's area that a random crop keeps.  `blend` mixes every image with
    another one: without it a training on few images overfits.  `temperature` divides the logits of a model with classes
    while it is trained: above 1, classes that are not the first count more.  `autocast` computes in bfloat16; None does
    so on a CPU that can multiply bfloat16, where it takes half of the time.  On CUDA it takes longer for small models.
    """

    loss: Loss | None = None
    epochs: int = 40
    learning_rate: float = 1e-3
    batch_size: int | None = None
    seed: int = 0
    progress: bool = True
    resume: str | os.PathLike[str] | None = None
    smallest_crop: float = 0.5
    blend: bool = True
    temperature: float = 2.0
    autocast: bool | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        for name, least in (("epochs", 1), ("seed", None), ("batch_size", 1)):
            number = getattr(self, name)
            if name == "batch_size" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or (least is not None and number < least):
                wanted = "a whole number" + ("" if least is None else f" >= {least}")
                raise BadOption(f"{name} must be {wanted}; got {number!r}")
        check_number("learning_rate", self.learning_rate, at_least=0)
        check_number("temperature", self.temperature, at_least=LEAST_TEMPERATURE)
        if self.resume is not None:
            check_can_write(self.resume)
