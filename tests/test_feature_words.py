"""Each feature is in one place: its folder of `conformance/features` (architecture D11, D14)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blockstep.conformance.protocol.features import BY_NAME, LATE

HOUSE = Path(__file__).resolve().parents[1]
TOOLS = HOUSE / "conformance" / "blockstep" / "conformance"
FOLDERS = sorted(path.parent for path in (TOOLS / "features").glob("*/__init__.py"))
MODULES = {"__init__", "draws", "goals", "properties", "worlds"}
"""Modules of a folder: those that are loaded, and no others."""
WORDS = {
    "adapters": re.compile(r"lora", re.IGNORECASE),
    "pins": re.compile(
        r"(?<![a-zA-Z])([Pp]in(s|ned)?|PINS?(?![A-Z])|[Cc]ontinuum|CONTINUUM)(?![a-z])"
    ),
    "tiers": re.compile(
        r"(?<![a-z])tiers?(?![a-z])|swap_min_tokens|admission_\w+_blocks", re.IGNORECASE
    ),
    "events": re.compile(r"enable_kv_cache_events"),
    "cadence": re.compile(r"prefill_(schedule_)?interval|[Pp]refill cadence|CADENCE"),
}
"""Words that name a feature. Features that are missing here still have words elsewhere."""
NOT_GENERIC = ("features", "engines/adapters", "museum", "prove")
"""Folders that are about features, or about other engines."""
PLACES = {
    "adapters": {
        "engine.py": "the capabilities that engines have",
        "command/generate.py": "an option of the model engine",
        "protocol/features.py": "the keys of blocks, of which the adapter is one",
        "lockstep/quirks.py": "the modules with quirks, by feature",
        "recorded/stream.py": "the fields of vLLM's own messages",
    },
    "pins": {
        "engine.py": "the capabilities that engines have",
        "protocol/features.py": "the table",
        "protocol/program.py": "the events that a program may have, and their text",
        "protocol/codec.py": "the parts of a state that an engine may show",
        "recorded/step_records.py": "the fields of records of another simulator",
    },
    "tiers": {
        "engine.py": "the capabilities that engines have",
        "judge/properties/work.py": "the parts of a state that a config lacks",
        "protocol/feature.py": "the fields of a config that contradict others",
        "protocol/features.py": "the table",
        "protocol/sources.py": "the title of a document",
    },
    "events": {
        "engine.py": "the capabilities that engines have",
        "judge/properties/work.py": "the parts of an answer that a config lacks",
    },
    "cadence": {
        "engine.py": "the capabilities that engines have",
    },
}
"""Modules outside of a feature's folder that have its words, and what they have there."""
FILES_MAX = {
    "adapters": (re.compile("max_loras"), 18),
    "pins": (WORDS["pins"], 34),
    "cadence": (
        re.compile(r"(?i)prefill_(schedule_)?interval|prefill.cadence|cadence\.FEATURE"),
        14,
    ),
}
"""Limits of the number of files that name a feature, in specification, engines and tools.

Adapters of other engines do not count. The word for the limit of LoRA slots is `max_loras`, since
the model engine has adapters without a limit. The limits may only fall; the aims, 20, 35 and 15,
are reached. One of the 34 names no pin: `impl/engine/host_to_device.py` calls `pin_memory`.
"""


def list_files(*folders: Path) -> list[Path]:
    """Return the modules of some folders, without adapters of other engines."""
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [file for file in files if TOOLS / "engines" / "adapters" not in file.parents]


def find_files(words: re.Pattern[str], files: list[Path]) -> list[Path]:
    """Return those of the files that have one of these words."""
    return [file for file in files if words.search(file.read_text())]


@pytest.mark.parametrize("name", WORDS)
def test_a_feature_is_named_in_its_folder_only(name: str) -> None:
    folders = [TOOLS / folder for folder in NOT_GENERIC]
    files = [file for file in list_files(TOOLS) if not {*folders} & {*file.parents}]
    found = {file.relative_to(TOOLS).as_posix() for file in find_files(WORDS[name], files)}
    assert found == PLACES[name].keys()


@pytest.mark.parametrize("name", FILES_MAX)
def test_a_feature_is_in_few_files(name: str) -> None:
    words, most = FILES_MAX[name]
    found = find_files(words, list_files(HOUSE / "spec", HOUSE / "impl", TOOLS))
    assert len(found) <= most, [file.relative_to(HOUSE).as_posix() for file in found]


@pytest.mark.parametrize("text", ["max_loras", "LoRA slots", "lora_name"])
def test_words_of_adapters_are_found(text: str) -> None:
    assert WORDS["adapters"].search(text)


@pytest.mark.parametrize("text", ["a pin", "given_pins", "PinEstimate", "has_pins", "CONTINUUM"])
def test_words_of_pins_are_found(text: str) -> None:
    assert WORDS["pins"].search(text)
    assert not WORDS["pins"].search("spinning opinions: ping, pinch, PINT")


def test_each_folder_is_a_feature_of_the_table() -> None:
    assert {folder.name for folder in FOLDERS} == {*LATE}
    for folder in FOLDERS:
        assert {file.stem for file in folder.glob("*.py")} <= MODULES, folder.name
        assert BY_NAME[folder.name].examples
