"""Features of merged tokens back in the order and the resolution of the original patches."""

from jaxtyping import Float
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.core.plan import unfold
from adamerge.patching.apply import trace


def unmerge(features: Float[Tensor, "b m d"], model: nn.Module, layer: int = -1) -> Float[Tensor, "b t d"]:
    """Give every original patch the feature of the token it was part of after `layer` of the last forward pass.

    What a merged model returns is full already; this is for features taken inside it, by a hook on a norm or an MLP.
    `features` hold the tokens of the whole batch, with the prefix tokens or without them; so does what is returned.
    """
    last = trace(model)
    plan = last.plan(layer)
    batch, patches = plan.slot.shape
    if features.shape[:2] == (batch, plan.width + last.prefix):
        return unfold(features, plan.after_prefix(last.prefix))
    if features.shape[:2] == (batch, plan.width):
        return unfold(features, plan)
    raise BadOption(
        f"after layer {layer} the last batch had {batch} images with at most {plan.width} merged tokens (of {patches}) "
        f"and {last.prefix} prefix tokens; got features of shape {tuple(features.shape)}. "
        "Name the layer they come from, and pass all images of the batch."
    )
