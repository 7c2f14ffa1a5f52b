"""Benchmarks of Omnibus: ratios, measured side by side in one run. `tools/bench/run NAME...`"""
