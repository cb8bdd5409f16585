"""Text worlds behind one small contract, a process pool that plays many at once, and frozen task sets."""
