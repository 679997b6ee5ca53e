// Everything a training program needs.
#pragma once

#include "lockstep/comm/group.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "lockstep/data/datasets.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/sampler.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/sync_batch_norm.h"
