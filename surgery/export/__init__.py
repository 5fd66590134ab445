"""Export hybrids, verify exports, and publish them on the Hub."""
