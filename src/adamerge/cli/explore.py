"""The command `adamerge explore`: a page on this machine that shows what merging does to an image."""

from typing import Annotated

import typer

from adamerge.cli.flags import EMBEDDED, Device, Model, NumClasses, Pretrained, Weights, console
from adamerge.core.errors import BadOption
from adamerge.core.packages import import_package

Port = Annotated[
    int | None, typer.Option("--port", help="The port on 127.0.0.1; by default the first free one from 7860 on.")
]


def explore(
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    device: Device = "cpu",
    port: Port = None,
) -> None:
    """Look at merging in the browser: drop an image, choose two methods, drag the cost.  Only on this machine."""
    if port is not None and not 1 <= port <= 65535:
        raise BadOption(f"--port must be from 1 to 65535; got {port}")
    import_package("gradio", "adamerge explore", "explore")
    from adamerge.cli.loading import load_model
    from adamerge.explore.app import serve
    from adamerge.explore.models import embedded_model, other_model

    models = {EMBEDDED: embedded_model()}
    if model != EMBEDDED:
        net = load_model(model, weights, pretrained, device, "fp32", num_classes=num_classes)
        models = {model: other_model(net), **models}

    def tell(address: str) -> None:
        console.print(f"open {address} in a browser; Ctrl-C ends it", highlight=False, soft_wrap=True)

    serve(models, port, tell)
