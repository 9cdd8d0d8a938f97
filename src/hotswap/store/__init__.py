"""What outlives a coordinator where there are several: a few keys with compare-and-swap, and leases."""
