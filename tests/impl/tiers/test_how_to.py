"""The page on sizes and costs shows the output of its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "size-the-cache.md"


def test_code_of_the_page_prints_the_output_shown(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(shown) == 2
    for code, printed in shown:
        exec(code, names)
        assert capsys.readouterr().out == printed
