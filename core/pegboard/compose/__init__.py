"""Config → composition → built parts: the one package that sees config, plugins, planner, engine and
runner.

`prepare` decides everything and starts nothing; `build_engine` makes the host's parts and
`start_engine` runs them; `build_worker` makes a worker's, in
this process, and `start_worker` in one of its own.
"""

from pegboard.compose.host import Starting, build_engine, load_tokenizer, start_engine
from pegboard.compose.making import Maker
from pegboard.compose.preparing import Prepared, from_wire, prepare, to_wire
from pegboard.compose.worker import build_worker, load_text_model, start_worker, target_unit

__all__ = [
    "Maker",
    "Prepared",
    "Starting",
    "build_engine",
    "build_worker",
    "from_wire",
    "load_text_model",
    "load_tokenizer",
    "prepare",
    "start_engine",
    "start_worker",
    "target_unit",
    "to_wire",
]
