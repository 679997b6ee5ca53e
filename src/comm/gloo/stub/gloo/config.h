// Declarations that let c10d/ProcessGroupGloo.hpp compile: libtorch ships that header and the code
// of Gloo, but not Gloo's own headers. They are private to that header's includer. Nothing declared
// here may be defined, constructed or derived from in our objects: destructors stay undeclared or
// undefined, so that what would need a wrong vtable fails to link.
#pragma once
