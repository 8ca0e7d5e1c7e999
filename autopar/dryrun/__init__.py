"""Check a plan for a cluster of any size on one machine: run ranks of it on tensors without data."""

from autopar.dryrun.check import dry_run, dry_run_captured
from autopar.dryrun.result import DryRun, RankReport

__all__ = ["DryRun", "RankReport", "dry_run", "dry_run_captured"]
