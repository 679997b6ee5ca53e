// See config.h.
#pragma once

#include <memory>
