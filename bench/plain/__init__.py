"""The two sides of `bench.engine`: a hot instance's engine, and SGLang's scheduler as it comes."""
