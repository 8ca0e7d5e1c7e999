"""Rewrite passes: `(TracedModel or graph, plan, position) -> graph`, one file and one public function each."""

from autopar.passes.pipeline import apply
from autopar.passes.prepare import prepare
from autopar.passes.seed_dropout import draws_randomly, row_ids_spec
from autopar.passes.token_loss import token_count

__all__ = ["apply", "draws_randomly", "prepare", "row_ids_spec", "token_count"]
