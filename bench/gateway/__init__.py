"""The parts of `bench.mesh`: a mock worker, a load generator, and the systems that stand between the two."""
