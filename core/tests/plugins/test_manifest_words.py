"""A manifest that says what nothing reads is refused: the entry, the word, what is allowed."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

import pegboard
from pegboard.errors import ManifestInvalid
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.manifest import SINGLE_FILE, Origin, Provides
from pegboard.plugins.manifest_reader import parse_manifest
from pegboard.plugins.vocabulary import OWN_FIELDS, PROMISES

ORIGIN = Origin(plugin="mine", distribution=SINGLE_FILE, version="", module="mine", path="mine.py")
SCHEDULER = 'interface = "scheduler"\nversion = {version}\nname = "mine"\nsummary = "s"\n'.format(
    version=max(CONTRACTS["scheduler"].versions)
)


def parsed(entry: str) -> Provides:
    text = f'[plugin]\nname = "mine"\n[[provides]]\n{SCHEDULER}{entry}'
    return parse_manifest(text, ORIGIN).provides[0]


@pytest.mark.parametrize(
    ("entry", "word", "allowed"),
    [
        ('promises = ["row_invarient"]', "row_invarient", "no promise"),
        ('requires.features = ["attention.mask"]', "attention.mask", "attention.query_mask"),
        ('requires.features = ["lse"]', "lse", "attention.lse"),
        ('requires.devices = ["gpu"]', "gpu", "cuda"),
        ('requires.device_features = ["avx3"]', "avx3", "avx2"),
        ('requires.dtypes = ["fp32"]', "fp32", "float32"),
        ('requires.capability = "8"', "capability", ""),
        ('operations = [{ operation = "gemm" }]', "gemm", "linear"),
        ("requires.block_sizes = [16]", "block_sizes", ""),
        ('layout = ":layout"', "layout", ""),
        ('methods = ["gptq"]', "methods", ""),
        ('encodings = ["int8"]', "encodings", ""),
    ],
)
def test_a_word_without_a_meaning_is_refused(entry: str, word: str, allowed: str) -> None:
    with pytest.raises(ManifestInvalid) as caught:
        parsed(entry)
    line = str(caught.value)
    assert word in line and allowed in line and "mine.py" in line


def test_what_plugins_promise_each_other_is_theirs() -> None:
    entry = parsed(
        'promises = ["acme.lottery"]\nrequires.features = ["kv_allocator.acme.compressed"]'
    )
    assert entry.promises == ("acme.lottery",)


@pytest.mark.parametrize(
    "promise", [f"{i}.{name}" for i, names in PROMISES.items() for name in names]
)
def test_every_promise_may_be_required(promise: str) -> None:
    (requires,) = parsed(f'requires.features = ["{promise}"]').requirements
    assert requires.features == (promise,)


def test_tables_of_words_speak_of_what_there_is() -> None:
    fields = {field.name for field in msgspec.structs.fields(Provides)}
    assert set(PROMISES) | set(OWN_FIELDS) <= set(CONTRACTS)
    for interface, own in OWN_FIELDS.items():
        assert set(own) <= fields
        assert set(CONTRACTS[interface].needs) <= set(own)


def test_no_promise_is_in_the_table_that_nothing_reads() -> None:
    """A promise is looked for in code, or an interface's file says what whoever makes it offers."""
    core = Path(pegboard.__file__).parent
    sources = [file.read_text() for file in core.rglob("*.py") if file.name != "vocabulary.py"]
    texts = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    promises = {name for names in PROMISES.values() for name in names}
    contracts = "".join(text for text in texts if "Manifest promise: `" in text)
    assert {name for name in promises - texts if f"`{name}`" not in contracts} == set()
