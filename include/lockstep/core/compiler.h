// What a program that uses Lockstep is compiled as; the other headers include this one.
#pragma once

#if __cplusplus < 202002L
#error "Lockstep needs C++20: give -std=c++20 or a later one"
#endif
#ifdef _GLIBCXX_DEBUG  // containers are others, without an error when the program is linked
#error "not with _GLIBCXX_DEBUG, as libtorch was compiled without: use _GLIBCXX_ASSERTIONS"
#endif
