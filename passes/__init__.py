"""Rewrite passes: `(TracedModel or graph, plan, position) -> graph`, one file and one public function each."""

from autopar.passes.canonicalize import canonicalize
from autopar.passes.pipeline import apply
from autopar.passes.prepare import copy_graph, prepare
from autopar.passes.seed_dropout import draws_randomly, row_ids_spec
from autopar.passes.token_loss import summed, token_count

__all__ = ["apply", "canonicalize", "copy_graph", "draws_randomly", "prepare", "row_ids_spec", "summed", "token_count"]
