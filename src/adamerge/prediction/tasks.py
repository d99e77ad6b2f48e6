"""What is written for each image: the most likely classes, or features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adamerge.core.errors import BadOption, UnsupportedModel
from adamerge.hosts.base import find_host

# Column -> a number or a vector for each image.
Columns = dict[str, Tensor]


@dataclass(frozen=True)
class TopClasses:
    """The `top` most likely classes and their probabilities."""

    top: int = 5
    name = "predict"

    def __post_init__(self) -> None:
        if isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1:
            raise BadOption(f"top is the number of classes to write for each image, at least 1; got {self.top!r}")

    def function(self, model: nn.Module) -> Callable[[Tensor], Columns]:
        """What makes columns of a batch of images."""

        def columns(images: Tensor) -> Columns:
            output: Any = model(images)
            logits = getattr(output, "logits", output)
            if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
                shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise UnsupportedModel(
                    f"predict needs a classifier that gives (images, classes) logits; got {shape}. "
                    "Use embed for the features of other models."
                )
            best = logits.float().softmax(1).topk(min(self.top, logits.shape[1]), dim=1)
            return {"classes": best.indices.int(), "probabilities": best.values}

        return columns


@dataclass(frozen=True)
class Features:
    """One vector for each image: what enters the classifier, or the pooled output of a model without one."""

    name = "embed"

    def function(self, model: nn.Module) -> Callable[[Tensor], Columns]:
        """What makes columns of a batch of images."""
        pooled = _pooled(model)

        def columns(images: Tensor) -> Columns:
            features = pooled(images)
            if not isinstance(features, Tensor) or features.dim() != 2:
                shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
                raise UnsupportedModel(f"embed needs a model that gives one vector for each image; got {shape}")
            return {"features": features.float()}

        return columns


Task = TopClasses | Features


def _pooled(model: Any) -> Callable[[Tensor], Any]:
    """The function that gives the features of a model."""
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):  # timm
        return lambda images: model.forward_head(model.forward_features(images), pre_logits=True)
    if hasattr(model, "encode_image"):  # open_clip
        return model.encode_image
    for name in ("classifier", "heads"):  # transformers, torchvision
        head = getattr(model, name, None)
        if isinstance(head, nn.Module):
            return lambda images: _input_of(head, model, images)
    entry = find_host(model).entry or model
    return lambda images: _one_vector(entry(images), find_host(model).class_token)


def _input_of(head: nn.Module, model: nn.Module, images: Tensor) -> Any:
    """What enters the head of a classifier."""
    seen: list[Any] = []
    handle = head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        model(images)
    finally:
        handle.remove()
    return seen[-1]


def _one_vector(output: Any, class_token: bool) -> Any:
    """The pooled output of a model of transformers; without one, the class token or the mean of all tokens."""
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled
    tokens = getattr(output, "last_hidden_state", output)
    if isinstance(tokens, Tensor) and tokens.dim() == 3:
        return tokens[:, 0] if class_token else tokens.mean(1)
    return tokens
