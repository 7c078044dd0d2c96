"""The lab: proofs under real faults, benchmarks, and the demonstration. It uses parti as any program does.

Nothing of `parti` imports it: `parti prove`, `parti bench` and `parti demo` are found by their entry points.
"""
