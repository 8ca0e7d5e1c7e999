"""Rewrite passes: `(TracedModel or graph, plan, position) -> graph`, one file and one public function each."""
