#pragma once

namespace heddle {

// Whether operations record a graph, per thread. True at start.
bool grad_enabled();

// Turns recording off (or back on) for the life of the object; the destructor restores what was, also on an exception.
class GradModeGuard {
 public:
  explicit GradModeGuard(bool enabled);
  ~GradModeGuard();
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  bool previous_;
};

class NoGradGuard : public GradModeGuard {
 public:
  NoGradGuard() : GradModeGuard(false) {}
};

}  // namespace heddle
