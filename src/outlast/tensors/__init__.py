"""One process, no network: reduction tree, buckets, fingerprints, robust rules. torch only."""
