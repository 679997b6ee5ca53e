// See config.h of the parent folder.
#pragma once
