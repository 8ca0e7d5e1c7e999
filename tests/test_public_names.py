"""What `import autopar` offers, and that it costs no import of torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

import autopar
import autopar.api


def test_plan_is_the_function_though_a_submodule_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import autopar.plan

    assert isinstance(autopar.plan, FunctionType)
    monkeypatch.setattr(autopar.api, "plan", lambda *args, **kwargs: (args, kwargs))
    seen: Any = autopar.plan("model", "cluster", pins=None)
    assert seen == (("model", "cluster"), {"pins": None})


def test_every_public_name_exists_and_is_documented() -> None:
    for name in autopar.__all__:
        assert inspect.getdoc(getattr(autopar, name)), name


def test_importing_autopar_imports_no_torch() -> None:
    code = "import sys, autopar; autopar.ClusterSpec.parse('dgx-h100:2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
