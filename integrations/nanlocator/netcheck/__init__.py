"""Is it the machine? ``python -m nanlocator.netcheck`` shows in a minute that every rank computes and
communicates correctly, or which one does not. docs/netcheck.md has the stages and the verdicts."""
