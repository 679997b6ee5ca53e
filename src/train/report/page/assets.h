// What the report's page is made of besides its text.
#pragma once

namespace lockstep::train {

extern const char* const kReportCss;
extern const char* const kReportJs;

}  // namespace lockstep::train
