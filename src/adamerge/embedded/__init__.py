"""A small vision transformer and the endless labelled images it was trained on, for machines without a network."""

from adamerge.embedded.model import build, load, preprocess
from adamerge.embedded.scene_generator import Scenes, scenes
from adamerge.embedded.shapes import CLASSES

__all__ = ["CLASSES", "Scenes", "build", "load", "preprocess", "scenes"]
