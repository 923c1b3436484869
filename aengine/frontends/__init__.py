"""HTTP, chat templates and text in processes of their own, around one engine process.

Owns: what crosses between the processes, both ends of it, and the life of the front-ends.
Does not know: how steps are computed, how requests are answered.
Invariants: a front-end never imports torch; only plain values of aengine.types and their like cross.
"""
