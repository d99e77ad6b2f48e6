"""A small trained ViT that ships with the library, and a generator of the labelled images it was trained on."""

from adamerge.embedded.model import build, load, preprocess
from adamerge.embedded.scene_generator import Scenes, scenes
from adamerge.embedded.shapes import CLASSES

__all__ = ["CLASSES", "Scenes", "build", "load", "preprocess", "scenes"]
