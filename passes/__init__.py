"""Rewrite passes: `(TracedModel or graph, plan, position) -> graph`, one file and one public function each."""

from autopar.passes.prepare import prepare

__all__ = ["prepare"]
