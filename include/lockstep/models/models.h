// The models that come with the library.
#pragma once

#include "lockstep/models/activation.h"
#include "lockstep/models/convnet.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/dialogues.h"
#include "lockstep/models/generate.h"
#include "lockstep/models/holder.h"
#include "lockstep/models/kv_cache.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/mlp.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"
#include "lockstep/models/transformer.h"
