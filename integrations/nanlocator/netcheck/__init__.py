"""Is it the machine? ``python -m nanlocator.netcheck`` shows within a minute that every rank computes and
communicates correctly, or which rank does not. docs/netcheck.md has the stages and the verdicts."""
