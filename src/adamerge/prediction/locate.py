"""Finds out what the images are that a user names: a folder of images, WebDataset shards or parquet files."""

from glob import glob
from pathlib import Path

from adamerge.core.errors import BadImages, BadOption
from adamerge.prediction.parquet_shards import ColumnNames, parquet_source
from adamerge.prediction.sources import SHARD_SIZE, Source, folder_source
from adamerge.prediction.tar_shards import expand_braces, tar_source

TAR = (".tar", ".tar.gz", ".tgz")
PARQUET = (".parquet",)


def find_source(
    data: str, *, shard_size: int = SHARD_SIZE, limit: int | None = None, columns: ColumnNames | None = None
) -> Source:
    """The images that `data` names.

    A folder with tar files is one of WebDataset shards, one with parquet files is one of those, and any other holds
    images, also below it.  `limit` takes that many images of a folder, evenly spaced.
    """
    if Path(data).is_dir():
        names = sorted(entry.name for entry in Path(data).iterdir() if not entry.name.startswith((".", "_")))
        shards = [str(Path(data) / name) for name in names if name.endswith((*TAR, *PARQUET))]
        if not shards:
            return folder_source(data, shard_size=shard_size, limit=limit)
    else:
        shards = _expand(data)
    if limit is not None:
        raise BadOption("a number of images can be chosen from a folder of images, not from shards; give fewer shards")
    kinds = {_kind(shard) for shard in shards}
    if len(kinds) > 1:
        raise BadImages(f"{data} names tar files and parquet files; give those of one kind")
    return tar_source(shards) if kinds == {"tar"} else parquet_source(shards, columns)


def _expand(data: str) -> list[str]:
    """The shards of a pattern, `shards/*.tar` or `shards/{000..099}.tar`, or of the address of one."""
    if "://" in data or data.startswith("pipe:"):
        return expand_braces(data)
    named = expand_braces(data) if "{" in data else [data]
    found = [path for name in named for path in (sorted(glob(name)) if "*" in name or "?" in name else [name])]
    missing = [path for path in found if not Path(path).is_file()]
    if missing or not found:
        raise BadImages(
            f"there is no {missing[0] if missing else data}; expected a folder of images, tar files (WebDataset) or "
            "parquet files, by name or by a pattern such as 'shards/*.tar'"
        )
    unknown = [path for path in found if not path.endswith((*TAR, *PARQUET))]
    if unknown:
        raise BadImages(f"{unknown[0]} is no folder, and its name ends in none of {', '.join((*TAR, *PARQUET))}")
    return found


def _kind(shard: str) -> str:
    return "parquet" if shard.endswith(PARQUET) else "tar"
