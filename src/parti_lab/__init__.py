"""The lab: proofs under real faults, benchmarks, and the demonstration. It uses parti as any program does.

Nothing of `parti` imports it: `parti prove`, `parti bench` and `parti demo` are found by their entry points.

Promises: a verdict names its seed, and the seed repeats it.

Flow: `prove` breaks things and judges, `bench` measures, `demo` shows.
"""
