"""The page of `adamerge explore`, made with gradio: controls on the left, the result on the right."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from PIL import Image

from adamerge.core.errors import AdamergeError, BadImages
from adamerge.core.packages import import_package
from adamerge.embedded import CLASSES, scenes
from adamerge.embedded.scene_generator import TEST_SEED
from adamerge.explore.explorer import COUNT, CUT, ExploredModel
from adamerge.explore.ladders import LABELS
from adamerge.explore.render import render
from adamerge.explore.uploads import MOST_BYTES, MOST_PIXELS, take_upload
from adamerge.search.variants import PRESET

if TYPE_CHECKING:
    from gradio import Blocks

HOST = "127.0.0.1"
EXAMPLES = 6
NOTHING = "nothing: one method only"
# The state of the page and its values at first; the address of the page has those that were changed.
FIRST: dict[str, Any] = {"model": "", "a": PRESET, "b": "tome", "mode": CUT, "cut": 30, "r": 14, "example": 0}
# Visitors that may wait for their turn; each needs a fraction of a second.
QUEUE = 64
# Seconds that an image stays in memory after it was last used.
FORGET = 600
TELL_ADDRESS = "(query) => { window.history.replaceState(null, '', query || window.location.pathname); return query; }"


class Page:
    """The functions behind the controls."""

    def __init__(self, models: Mapping[str, ExploredModel]):
        self.models = models
        drawn = scenes(0, EXAMPLES, seed=TEST_SEED)
        pixels = (drawn.images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
        self.examples = [Image.fromarray(one) for one in pixels]
        self.names = [CLASSES[label] for label in drawn.labels.tolist()]

    def upload(self, path: str | None) -> tuple[Any, str]:
        """Take the image of a file; a bad one leaves the page as it was, with a message."""
        if path is None:
            return None, ""
        try:
            return take_upload(path), ""
        except (BadImages, OSError) as error:
            return None, _say(str(error))

    def show(self, image: Any, *state: Any) -> tuple[str, str, str]:
        """The result, a message, and the address that brings the same state back."""
        chosen = dict(zip(FIRST, state, strict=True))
        model = self.models[chosen["model"]] if chosen["model"] in self.models else next(iter(self.models.values()))
        labels = [label for label in (chosen["a"], chosen["b"]) if label != NOTHING]
        strength = chosen["cut"] / 100 if chosen["mode"] == CUT else chosen["r"]
        shown = image if image is not None else self.examples[int(chosen["example"]) % EXAMPLES]
        try:
            found, said = render(model.look(shown, labels, chosen["mode"], strength)), ""
        except AdamergeError as error:
            found, said = "", _say(str(error))
        return found, said, address(chosen)

    def restore(self, query: Mapping[str, str]) -> list[Any]:
        """The state in an address; what it lacks, or what is not valid, is as at first."""
        first = {**FIRST, "model": next(iter(self.models))}
        allowed = {"model": list(self.models), "a": LABELS, "b": (*LABELS, NOTHING), "mode": (CUT, COUNT)}
        for name, choices in allowed.items():
            if query.get(name) in choices:
                first[name] = query[name]
        for name, most in (("cut", 60), ("r", 60), ("example", EXAMPLES - 1)):
            text = query.get(name, "")
            if text.isdigit() and int(text) <= most:
                first[name] = int(text)
        return list(first.values())


def address(state: Mapping[str, Any]) -> str:
    """The query of the page's address: what differs from the first state."""
    changed = {name: value for name, value in state.items() if name != "model" and value != FIRST[name]}
    if state["model"] and state["model"] != "embedded":
        changed["model"] = state["model"]
    return f"?{urlencode(changed)}" if changed else ""


def _say(text: str) -> str:
    return f'<p class="said" role="alert">{escape(text)}</p>'


def build(models: Mapping[str, ExploredModel]) -> "Blocks":
    """The page; nothing is started."""
    # Before the import: gradio reads it there.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    gr: Any = import_package("gradio", "adamerge explore", "explore")
    page = Page(models)
    limits = f"at most {MOST_BYTES / 1e6:g} MB and {MOST_PIXELS / 1e6:g} megapixels"
    with gr.Blocks(title="adamerge explore", analytics_enabled=False, delete_cache=(60, 60)) as blocks:
        gr.Markdown("# adamerge explore\nWhich tokens of an image a merged Vision Transformer keeps, block by block.")
        image = gr.State(None, time_to_live=FORGET)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                gallery = gr.Gallery(
                    [(one, name) for one, name in zip(page.examples, page.names, strict=True)],
                    label="Examples", columns=3, height=230, allow_preview=False, elem_id="examples", buttons=[],
                )  # fmt: skip
                file = gr.File(label=f"Your image, {limits}; nothing is kept", file_types=["image"], height=120)
                model = gr.Dropdown(list(models), label="Model", visible=len(models) > 1, elem_id="model")
                first = gr.Dropdown(list(LABELS), value=FIRST["a"], label="Method", elem_id="first")
                second = gr.Dropdown([*LABELS, NOTHING], value=FIRST["b"], label="Beside it", elem_id="second")
                mode = gr.Radio([CUT, COUNT], value=CUT, label="Set the strength by", elem_id="mode")
                cut = gr.Slider(0, 60, FIRST["cut"], step=1, label="Compute saved, %", elem_id="cut")
                count = gr.Slider(
                    1, 60, FIRST["r"], step=1, label="r (AdaMerge: r_max)", elem_id="r", interactive=False
                )
            with gr.Column(scale=3, min_width=300):
                status = gr.HTML(elem_id="status")
                result = gr.HTML(elem_id="result")
        example = gr.Number(FIRST["example"], visible=False)
        query = gr.Textbox(visible="hidden", elem_id="address")
        controls = [model, first, second, mode, cut, count, example]
        _connect(gr, blocks, page, controls, {"image": image, "file": file, "gallery": gallery},
                 [result, status, query])  # fmt: skip
    return blocks


def _connect(
    gr: Any, blocks: Any, page: Page, controls: list[Any], inputs: Mapping[str, Any], outputs: list[Any]
) -> None:
    """Let the controls call the functions of the page."""
    image, file, gallery = inputs["image"], inputs["file"], inputs["gallery"]
    status, query, example, mode = outputs[1], outputs[2], controls[-1], controls[3]
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    update: dict[str, Any] = {"fn": page.show, "inputs": [image, *controls], "outputs": outputs, **quiet}

    def restored(request: "gr.Request") -> list[Any]:  # pyright: ignore[reportInvalidTypeForm]
        return page.restore(dict(request.query_params))

    def chosen(event: "gr.SelectData") -> tuple[int, None, None]:  # pyright: ignore[reportInvalidTypeForm]
        return event.index, None, None

    # gradio reads these annotations to pass the request and the event.
    restored.__annotations__["request"], chosen.__annotations__["event"] = gr.Request, gr.SelectData
    blocks.load(restored, None, controls, **quiet).then(**update)
    for control in controls[:-1]:
        control.input(**update, trigger_mode="always_last")
    mode.change(
        lambda now: (gr.update(interactive=now == CUT), gr.update(interactive=now == COUNT)),
        mode,
        controls[4:6],
        **quiet,
    )
    gallery.select(chosen, None, [example, image, file], **quiet).then(**update)
    file.upload(page.upload, file, [image, status], **quiet).then(**_unless_refused(page, update))
    file.clear(lambda: None, None, image, **quiet).then(**update)
    query.change(None, query, query, js=TELL_ADDRESS)


def _unless_refused(page: Page, update: Mapping[str, Any]) -> dict[str, Any]:
    """Show the result of an upload, but keep the message of one that was refused."""
    status = update["outputs"][1]

    def show(said: str, image: Any, *state: Any) -> tuple[str, str, str]:
        found, told, where = page.show(image, *state)
        return found, said or told, where

    return {**update, "fn": show, "inputs": [status, *update["inputs"]]}


@contextmanager
def serving(models: Mapping[str, ExploredModel], port: int | None = None) -> Iterator[tuple[Any, str]]:
    """The running page and its address, on this machine only, until the end of the `with` block.

    Uploaded files lie in a folder of their own until they are read; it is deleted at the end.
    """
    with TemporaryDirectory(prefix="adamerge-explore-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        blocks: Any = build(models)
        themes = import_module("gradio.themes")
        blocks.queue(max_size=QUEUE, default_concurrency_limit=1)
        options: dict[str, Any] = {
            "server_name": HOST,
            "server_port": port,
            "share": False,
            "quiet": True,
            "prevent_thread_lock": True,
            "ssr_mode": False,
            "max_file_size": MOST_BYTES,
            "show_error": True,
            "footer_links": [],
            "enable_monitoring": False,
            "state_session_capacity": QUEUE,
            # The default theme loads fonts from a network.
            "theme": themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
            "css": Path(__file__).with_name("app.css").read_text(encoding="utf-8"),
        }
        try:
            yield blocks, blocks.launch(**options)[1]
        finally:
            blocks.close(verbose=False)


def serve(models: Mapping[str, ExploredModel], port: int | None, tell: Callable[[str], object]) -> None:
    """Run the page until Ctrl-C; `tell` is called with its address."""
    with serving(models, port) as (blocks, where):
        tell(where)
        blocks.block_thread()
