// The data sets that come with the library.
#pragma once

#include "lockstep/data/csv.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/idx_dataset.h"
#include "lockstep/data/image_folder.h"
#include "lockstep/data/mnist.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/synthetic_regression.h"
#include "lockstep/data/tensor_dataset.h"
