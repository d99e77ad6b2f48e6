"""The run-time checker of shapes and types that the tests switch on: beartype, with whole numbers accepted as real."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
