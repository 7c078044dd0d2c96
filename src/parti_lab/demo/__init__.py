"""`make run`, `parti run --demo`: the main job on one machine, with things that go wrong on purpose."""
