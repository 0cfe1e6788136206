"""decide(belief, state) -> Decision. The same objects decide at plan time and at run time; scalars or arrays."""
