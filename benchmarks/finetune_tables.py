"""The table of fine-tuning and the statement that it tests."""

import torch
from torch import Tensor


def pack_answers(right: Tensor) -> str:
    """Which images are classified correctly, as hexadecimal digits; the first image is the highest bit."""
    bits = "".join("1" if one else "0" for one in right.tolist())
    return f"{int(bits, 2):0{-(-len(bits) // 4)}x}"


def unpack_answers(text: str, images: int) -> Tensor:
    """The packed answers as a tensor of 0 and 1."""
    bits = f"{int(text, 16):0{images}b}"
    return torch.tensor([float(bit) for bit in bits], dtype=torch.float64)
