"""Config → composition → built parts: the one package that sees config, plugins, planner, engine and
runner.

`prepare` decides everything and starts nothing; `build_engine` makes the host's parts and
`start_engine` runs them; `start_worker` makes a worker in a process of its own.
"""

from pegboard.compose.host import Starting, build_engine, load_tokenizer, start_engine
from pegboard.compose.preparing import Prepared, from_wire, prepare, to_wire
from pegboard.compose.worker import load_text_model, start_worker, target_unit

__all__ = [
    "Prepared",
    "Starting",
    "build_engine",
    "from_wire",
    "load_text_model",
    "load_tokenizer",
    "prepare",
    "start_engine",
    "start_worker",
    "target_unit",
    "to_wire",
]
