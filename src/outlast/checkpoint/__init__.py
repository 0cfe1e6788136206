"""Arena, chunks, tiers, resharding, interchange. Manifest and verify never import torch."""
